"""Settings and options: what each means, takes and decides, and how files and assignments become settings.
Nothing here knows methods, models or data; names of them stay text."""

from fedcsd.config.options import option
from fedcsd.config.settings import Settings

__all__ = ["Settings", "option"]
