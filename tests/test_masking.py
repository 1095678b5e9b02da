"""ndpp.mask: padding takes no part in statistics and scale."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ndpp
from ndpp import Settings


def lengths_mask(lengths: list[int], size: int) -> torch.Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
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


BUILDS = {
    "3x3": lambda **o: ndpp.Conv2d(3, 4, 3, padding=1, **o),
    "3x3 stride 2": lambda **o: ndpp.Conv2d(3, 4, 3, stride=2, padding=1, **o),
    "3x3 grouped": lambda **o: ndpp.Conv2d(3, 6, 3, padding=1, groups=3, **o),
    "1x1": lambda **o: ndpp.Conv2d(3, 4, 1, **o),
    "transposed": lambda **o: ndpp.ConvTranspose2d(3, 4, 2, stride=2, **o),
    "network": lambda **o: nn.Sequential(
        ndpp.Conv2d(3, 4, 3, stride=2, padding=1, **o), nn.ReLU(), ndpp.Conv2d(4, 4, 3, stride=2, padding=1, **o)
    ),
}


def padded_batch(images: list[torch.Tensor], size: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.full((len(images), 3, size, size), fill, dtype=torch.float64)
    valid = torch.zeros(len(images), size, size, dtype=torch.bool)
    for i, image in enumerate(images):
        batch[i, :, : image.shape[2], : image.shape[3]] = image[0]
        valid[i, : image.shape[2], : image.shape[3]] = True
    return batch, valid


@pytest.mark.parametrize("fill", [0.0, 1e3, torch.nan])
@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("build", BUILDS)
def test_images_of_different_sizes(build: str, scale: Any, fill: float) -> None:
    """Padded images give the statistics and the outputs that they give one by one, whatever the padding holds."""
    options: dict[str, Any] = {"dtype": torch.float64, "settings": Settings(rows=None, scale=scale)}
    layer, alone = BUILDS[build](**options), BUILDS[build](**options)
    images = [torch.randn(1, 3, *s, dtype=torch.float64) + 1 for s in [(8, 8), (4, 8), (8, 4)]]
    batch, valid = padded_batch(images, 8, fill)
    with ndpp.mask(valid):
        layer(batch)
    if build != "network":  # there, the second layer's input depends on the batch of the first
        outputs = [alone(image) for image in images]  # kept alive: one step, so they merge
        assert len(outputs) == 3
        assert alone.num_batches_tracked == 1
        torch.testing.assert_close(layer.running_mean, alone.running_mean)
        torch.testing.assert_close(layer.running_cov, alone.running_cov)
    layer.eval()
    with ndpp.mask(valid):
        y = layer(batch)
    for padded, image in zip(y, images, strict=True):
        want = layer(image)[0]
        torch.testing.assert_close(padded[:, : want.shape[1], : want.shape[2]], want)


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
def test_checkpointing_with_the_mask_inside(reentrant: bool) -> None:
    """The context inside the checkpointed function is there again, whatever happened in between."""
    layer = ndpp.Linear(4, 2, dtype=torch.float64, settings=Settings(rows=None))
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    one, other = torch.arange(6) < 4, torch.arange(6) > 2

    def block(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        with ndpp.mask(valid):
            return layer(x)

    sum(block(x, valid).square().sum() for valid in (one, other)).backward()
    want, x.grad = x.grad, None
    outputs = [checkpoint(block, x, valid, use_reentrant=reentrant) for valid in (one, other)]
    layer(x)
    sum(y.square().sum() for y in outputs).backward()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_a_mask_made_inside(reentrant: bool) -> None:
    layer = ndpp.Linear(4, 2)

    def block(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with ndpp.mask(torch.arange(5) < lengths[:, None]):
            return layer(x)

    x = torch.randn(3, 5, 4, requires_grad=True)
    for step in range(20):
        outputs = [checkpoint(block, x, torch.tensor([5, step % 5, 1]), use_reentrant=reentrant) for _ in range(2)]
        sum(y.sum() for y in outputs).backward()
    assert torch.isfinite(x.grad).all()


def test_a_layer_first_called_in_a_backward_hook() -> None:
    layer, y = ndpp.Linear(2, 2), nn.Linear(4, 2)(torch.randn(8, 4))
    y.register_hook(lambda grad: layer(grad).detach())
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_notices_a_mask_that_is_gone_or_new(reentrant: bool) -> None:
    layer = ndpp.Linear(4, 2)
    x, valid = torch.randn(6, 4, requires_grad=True), torch.arange(6) < 4
    with ndpp.mask(valid):
        outside = checkpoint(layer, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"enter ndpp.mask inside the function"):
        outside.sum().backward()
    layer = ndpp.Linear(4, 2)
    plain = checkpoint(layer, x, use_reentrant=reentrant)
    with ndpp.mask(valid), pytest.raises(RuntimeError, match=r"runs this layer again under ndpp.mask"):
        plain.sum().backward()


def test_threads_have_their_own_masks() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ndpp.mask(torch.zeros(5, dtype=torch.bool)):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    layer = ndpp.Linear(4, 2)
    layer(torch.randn(7, 4))
    layer(torch.randn(5, 4))
    leave.set()
    thread.join()
    assert layer.num_batches_tracked == 2


def test_token_masks_are_not_stretched() -> None:
    with ndpp.mask(torch.ones(2, 10, dtype=torch.bool)), pytest.raises(ValueError, match=r"positions \(2, 11\)"):
        ndpp.Linear(4, 3)(torch.randn(2, 11, 4))


def test_a_mask_of_whole_samples() -> None:
    layer, alone = (ndpp.Conv2d(2, 3, 3, settings=Settings(rows=None)) for _ in range(2))
    x = torch.randn(4, 2, 6, 6)
    with ndpp.mask(torch.tensor([True, False, True, True])):
        layer(x)
    alone(x[[0, 2, 3]])
    torch.testing.assert_close(layer.running_cov, alone.running_cov)
