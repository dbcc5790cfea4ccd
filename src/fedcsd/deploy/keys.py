"""Make the certificates of a SuperLink and the keys of nodes, as files for Flower's own commands."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 825


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write ca.crt for everybody, and server.crt and server.key for the SuperLink.

    The authority's key is not kept: another name of the server needs a new set.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _name("fedcsd federation")
    ca = _builder(issuer, issuer, authority.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(), critical=True)
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    own = _builder(_name(hosts[0]), issuer, server.public_key())
    own = own.add_extension(names, critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    own = own.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / "server.crt").write_bytes(own.sign(authority, hashes.SHA384()).public_bytes(pem))
    plain = serialization.NoEncryption()
    write_secret(folder / "server.key", server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def make_node_key(path: Path) -> Path:
    """Write a node's private key, and beside it the public key for the server; return the public key's path."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key, plain = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
    kind = serialization.PrivateFormat.OpenSSH
    write_secret(path, key.private_bytes(serialization.Encoding.PEM, kind, plain))
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return public


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only this user may read; raise FileExistsError if there is one."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
        now - datetime.timedelta(hours=1)
    )
    return builder.not_valid_after(now + datetime.timedelta(days=DAYS))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage() -> x509.KeyUsage:
    names = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    unused = dict.fromkeys(names.split(), False)
    return x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **unused)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
