"""ndpp: layers that decorrelate what they see, in place of normalisation."""

from .convert import convert_
from .fold import fold_
from .inspection import inspect
from .layers import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Linear
from .masking import mask
from .recalibrate import recalibrate_
from .report import Report
from .settings import Settings
from .version import __version__

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Linear",
    "Report",
    "Settings",
    "__version__",
    "convert_",
    "fold_",
    "inspect",
    "mask",
    "recalibrate_",
]
