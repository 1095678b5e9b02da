"""From plain models to ND++ and back: what becomes of every module of a model."""

from .convert import convert_
from .fold import fold_
from .report import Report
from .share import share_

__all__ = ["Report", "convert_", "fold_", "share_"]
