"""ndpp.mask: padding takes no part in statistics and scale."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndpp
from ndpp import Settings


def lengths_mask(lengths: list[int], size: int) -> torch.Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("scale", ["none", "l1", "std", "standardize"])
def test_tokens(scale: Any) -> None:
    """A padded batch of sentences has the statistics and the outputs of its real tokens alone, NaN padding included."""
    settings = Settings(rows=None, scale=scale)
    x, valid = torch.randn(3, 7, 5, dtype=torch.float64), lengths_mask([7, 2, 4], 7)
    layer, alone = (ndpp.Linear(5, 4, dtype=torch.float64, settings=settings) for _ in range(2))
    alone.load_state_dict(layer.state_dict())
    padded = torch.where(valid[..., None], x, torch.nan if scale == "none" else 1e3)
    want = alone(x[valid])
    with ndpp.mask(valid):
        y = layer(padded)
        flat = layer(padded.flatten(0, 1))
    torch.testing.assert_close(y[valid], want)
    torch.testing.assert_close(flat.reshape(y.shape)[valid], want)
    torch.testing.assert_close(layer.running_cov, alone.running_cov)
    torch.testing.assert_close(layer.running_mean, alone.running_mean)


@pytest.mark.parametrize("scale", ["none", "l1", "std", "standardize"])
@pytest.mark.parametrize(
    "build",
    [
        lambda **o: ndpp.Conv2d(3, 4, 3, padding=1, **o),
        lambda **o: ndpp.Conv2d(3, 4, 3, stride=2, padding=1, **o),
        lambda **o: ndpp.Conv2d(3, 4, 1, **o),
        lambda **o: ndpp.ConvTranspose2d(3, 4, 2, stride=2, **o),
    ],
    ids=["3x3", "3x3 stride 2", "1x1", "transposed"],
)
def test_images_of_different_sizes(build: Any, scale: Any) -> None:
    """Images padded with zeros at the right and bottom: the statistics of the images, one by one."""
    settings = Settings(rows=None, scale=scale, momentum=None)
    sizes = [(8, 6), (4, 8), (6, 4)]
    images = [torch.randn(1, 3, *s, dtype=torch.float64) + 1 for s in sizes]
    batch = torch.zeros(3, 3, 8, 8, dtype=torch.float64)
    valid = torch.zeros(3, 8, 8, dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[2], : image.shape[3]] = image[0]
        valid[i, : image.shape[2], : image.shape[3]] = True
    layer, alone = build(dtype=torch.float64, settings=settings), build(dtype=torch.float64, settings=settings)
    outputs = [alone(image) for image in images]  # one step: kept alive, so they merge
    with ndpp.mask(valid):
        y = layer(batch)
    assert y.shape[0] == 3
    assert len(outputs) == 3
    assert alone.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, alone.running_mean)
    torch.testing.assert_close(layer.running_cov, alone.running_cov)


def test_masks_follow_a_network_down() -> None:
    """One image mask serves all resolutions and the pooled head."""
    net = nn.Sequential(
        ndpp.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        ndpp.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        ndpp.Linear(4, 2),
    )
    valid = torch.zeros(3, 13, 16, dtype=torch.bool)
    valid[:2, :9, :] = True
    with ndpp.mask(valid):
        net(torch.randn(3, 3, 13, 16)).sum().backward()
    assert all(m.num_batches_tracked == 1 for m in net if hasattr(m, "num_batches_tracked"))


def test_all_padding_leaves_no_trace() -> None:
    layer = ndpp.Linear(4, 2)
    layer(torch.randn(9, 4)).sum().backward()
    before = layer.running_cov.clone()
    with ndpp.mask(torch.zeros(5, dtype=torch.bool)):
        y = layer(torch.randn(5, 4))
    assert torch.isfinite(y).all()
    assert torch.equal(before, layer.running_cov)
    assert layer.num_batches_tracked == 1


def test_sampling_counts_valid_rows_only() -> None:
    layer = ndpp.Conv1d(2, 2, 1, dtype=torch.float64, settings=Settings(rows=600, momentum=None))
    x = torch.randn(16, 2, 100, dtype=torch.float64) + 3
    valid = lengths_mask([40] * 16, 100)
    x[:, :, 40:] = -50
    with ndpp.mask(valid), torch.no_grad():
        layer(x)
    assert (layer.running_mean - 3).abs().max() < 0.5


def test_none_switches_off_and_the_outer_mask_returns() -> None:
    valid = torch.ones(3, 2, dtype=torch.bool)
    layer = ndpp.Linear(4, 2)
    with ndpp.mask(valid):
        with pytest.raises(ValueError, match=r"ndpp.Linear.*positions \(5, 7\).*got \(3, 2\).*ndpp.mask\(None\)"):
            layer(torch.randn(5, 7, 4))
        with ndpp.mask(None):
            layer(torch.randn(5, 7, 4))
        layer(torch.randn(3, 2, 4))
    layer(torch.randn(5, 7, 4))


@pytest.mark.parametrize("bad", [None.__class__, [True], torch.ones(3), torch.tensor(True)])
def test_only_boolean_tensors_are_masks(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a boolean tensor of shape \(batch, ...\)"), ndpp.mask(bad):
        pass


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_needs_the_mask_again(reentrant: bool) -> None:
    layer = ndpp.Linear(4, 2)
    x, valid = torch.randn(6, 4, requires_grad=True), torch.arange(6) < 4
    with ndpp.mask(valid):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        y = checkpoint(layer, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="call backward inside the context"):
        y.sum().backward()
