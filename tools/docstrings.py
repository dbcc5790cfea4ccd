"""List docstrings that state nothing: no imperative verb at the start and no finite verb in the first sentence.

`python tools/docstrings.py src tests` prints them with their places and exits with 1 if there are any.
Strings below a field of a dataclass are labels and are not read.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

VERBS = """
    accept act add adopt align allow answer appear append apply approve ask assemble assign attach
    augment average balance be become begin belong bind block bound break bring build cache call cancel
    capture carry cast catch change check choose claim classify clear clip close collect come commit
    compare compile complete compress compute concatenate configure connect consist contain continue
    control convert copy correct cost count cover create cross cut deal declare decode decompose define
    delay delete deliver depend derive describe deserialise detach detect differ digest disable discard
    discover display distil divide do download draw drop dump edit embed emit enable encode end enforce
    ensure enter erase escape estimate evaluate exceed exchange exclude execute exist exit expand expect
    explain export expose extend extract fail fall feed fetch fill filter find finish fit fix flatten
    flush fold follow force fork form format forward free freeze gather generate get give go grow guard
    guess handle hash have help hide hold identify ignore implement import include increase index infer
    inherit initialise insert inspect install interpret interrupt iterate join judge keep kill know
    label last launch lead learn leave let lie limit list listen load locate lock log look lower make
    map mark mask match mean measure merge mix modify move multiply name need normalise note obtain
    offer omit open order outlast own pack pad parse pass patch permute pick place plot point pool
    prepare prevent print produce project prove provide prune publish pull push put raise read rebuild
    receive recognise record redraw reduce refer refuse register reject release reload remove rename
    render repeat replace replay report represent request require reset resolve respect restart restore
    resume return reuse reveal rewrite round run sample save scale score search see seed select send
    separate serialise serve set shape share shift show shuffle shut sign simulate skew skip sleep
    smooth solve sort speak spend split spoil spread stack stand start state stay step stop store
    stratify stream strip study submit subtract suggest sum support swap switch synchronise take tell
    test time total track train transform translate travel treat try turn undo unpack unwrap update
    upload use validate verify visit wait walk want warn watch weigh weight work wrap write yield
"""
"""Imperatives that may begin a docstring; their third person counts as a verb of the first sentence."""
AUXILIARIES = "is are was were has have had can cannot must may might will would should does do did"
IMPERATIVES = frozenset(VERBS.split())


def third_person(verb: str) -> str:
    """Return the form that goes with `it`."""
    if re.search(r"(s|x|z|ch|sh|o)$", verb):
        return verb + "es"
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + "s"


FINITE = frozenset(AUXILIARIES.split()) | {third_person(verb) for verb in IMPERATIVES}
NOUN_CLAUSE = re.compile(
    r"(What|Those|Where|Whether|Told|How|Who|Whoever|That|Which|As|Of|In|There|Not|No|Nothing|Some|When|If)\b"
)


def states(docstring: str) -> bool:
    """Tell whether the first sentence has a verb where one belongs."""
    first = re.split(r"(?<=[.:;])\s", " ".join(docstring.split()), maxsplit=1)[0]
    plain = re.sub(r"`[^`]*`", "x", first)
    words = re.findall(r"[A-Za-z']+", plain)
    if not words or NOUN_CLAUSE.match(plain):
        return False
    if words[0].lower() in IMPERATIVES:
        return True
    if words[0] in ("Callbacks", "Fixture"):
        return True
    return any(word.lower() in FINITE for word in words[1:])


def offenders(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first line of each docstring in a file that states nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring and not states(docstring):
                yield getattr(node, "lineno", 1), docstring.splitlines()[0]


def main(arguments: list[str]) -> int:
    """Print every offender below the given folders."""
    paths = sorted(path for folder in arguments for path in Path(folder).rglob("*.py"))
    found = [(path, line, text) for path in paths for line, text in offenders(path)]
    for path, line, text in found:
        print(f"{path}:{line}: no verb: {text}")
    if "--count" in arguments or found:
        print(f"{len(found)} docstrings without a verb", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
