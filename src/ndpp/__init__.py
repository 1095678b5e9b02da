"""ndpp: layers that decorrelate what they see, in place of normalisation."""

from .layers import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Linear
from .masking import mask
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
    "Settings",
    "__version__",
    "mask",
]
