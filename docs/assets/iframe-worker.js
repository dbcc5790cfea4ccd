// Search from a folder: browsers refuse workers to pages that were opened as files, so that an
// invisible frame does the work of one. Pages that come from a server never get here.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...scripts) =>
        scripts.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.ready = this.load(script)
    }

    load(script) {
      return new Promise((done, failed) => {
        const page = this.inside.document
        const tag = Object.assign(page.createElement("script"), { src: script, onload: done, onerror: failed })
        page.head.append(tag)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
