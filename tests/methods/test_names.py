"""Every method can be had from the package itself."""

import fedcsd
from fedcsd.methods import methods


def test_every_method_is_a_name_of_the_package() -> None:
    for name in methods.names:
        cls = methods.load(name)
        assert getattr(fedcsd, cls.__name__) is cls
        assert cls.__name__ in fedcsd.__all__
