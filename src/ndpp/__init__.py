"""ndpp: layers that decorrelate what they see, in place of normalisation."""

from .conversion import Report, convert_, fold_, share_
from .inspection import Inspection, inspect
from .layers import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Linear
from .masking import mask
from .recalibrate import recalibrate_
from .settings import Settings
from .version import __version__

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Inspection",
    "Linear",
    "Report",
    "Settings",
    "__version__",
    "convert_",
    "fold_",
    "inspect",
    "mask",
    "recalibrate_",
    "share_",
]
