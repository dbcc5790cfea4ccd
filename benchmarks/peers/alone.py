"""Runs a command in a network namespace that has nothing but 127.0.0.1.

    unshare --map-root-user --net python alone.py COMMAND…

Ray and torch.distributed listen on all of a machine's addresses, whatever they are told. In here there
is only the loopback interface, which begins switched off.
"""

import fcntl
import os
import socket
import struct
import sys

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # of Linux' <linux/sockios.h> and <net/if.h>


def switch_on(interface: bytes = b"lo") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, GET_FLAGS, struct.pack("16sh14x", interface, 0))
        flags = struct.unpack("16sh14x", answer)[1] | UP
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", interface, flags))


if __name__ == "__main__":
    switch_on()
    os.execvp(sys.argv[1], sys.argv[1:])
