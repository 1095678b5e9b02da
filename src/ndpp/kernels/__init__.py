"""THE DISPATCH POINT: the stages of a training call, by a kernel where one takes the case, else in plain PyTorch.

Every stage has the signature of its plain twin. A kernel declines with a reason, which `explain` shows.
"""

from .plain import (
    Plan,
    View,
    folded,
    folded_adjoint,
    known,
    moments,
    moments_adjoint_,
    root,
    root_adjoint,
    scale,
    scale_adjoint_,
    scaled_part,
    usable,
)

__all__ = [
    "Plan",
    "View",
    "folded",
    "folded_adjoint",
    "known",
    "moments",
    "moments_adjoint_",
    "root",
    "root_adjoint",
    "scale",
    "scale_adjoint_",
    "scaled_part",
    "usable",
]
