"""Gradients averaged in DDP's buckets; here of one rank, with a bucket made by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_sparsecomm import PeerError
from lightning_sparsecomm.basis import DDP_UNUSED, Wire
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.exchange.dense import WIRE_DTYPES
from lightning_sparsecomm.sharing import BucketSync, GradientSync
from lightning_sparsecomm.sharing.bucket import BucketHook
from lightning_sparsecomm.sharing.gradient_share import GradientShare


class Bucket:
    """As DDP gives one to its hook."""

    def __init__(self, values: Sequence[float], last: bool = True) -> None:
        self.values, self.last = torch.tensor(values), last

    def buffer(self) -> Tensor:
        return self.values

    def is_last(self) -> bool:
        return self.last


def reduced(hook: BucketHook, bucket: Any) -> Tensor:
    future = hook.hook(None, bucket)
    future.wait()
    return future.value()


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_a_bucket_becomes_its_mean_as_the_wire_rounds_it(wire: Wire, dtype: Any) -> None:
    wire.world_size = 2  # One addend, divided by two: what a rank of zeros would leave.
    bucket = Bucket([1.0, 3.0, 1 / 3])
    hook = BucketHook(BucketSync(dtype), wire)
    hook.begin()
    found = reduced(hook, bucket)
    hook.finish()
    half = torch.tensor([0.5, 1.5, 1 / 6])
    assert torch.equal(found, half.to(WIRE_DTYPES[dtype] or half.dtype).to(half.dtype))
    assert found.data_ptr() == bucket.values.data_ptr()
    ledger = wire.ledger
    assert ledger.handed_bytes() == 3 * (WIRE_DTYPES[dtype] or torch.float32).itemsize
    assert (ledger.ddp_bytes, ledger.elements, ledger.sent_elements) == (12, 3, 3)
    # What is left of the sum when the backward pass has ended is waited for.
    assert ledger.exchange_seconds > 0


def test_float16_clamps_what_is_finite_and_counts_it(wire: Wire) -> None:
    hook = BucketHook(BucketSync("float16"), wire)
    with pytest.warns(UserWarning, match="2 values beyond ±"):
        found = reduced(hook, Bucket([1e6, -1e6, 3e4, torch.inf, torch.nan]))
    assert found[0] == -found[1] > 6e4
    assert found[2] == 3e4
    assert found[3] == torch.inf
    assert found[4].isnan()
    assert wire.ledger.clamped_elements == 2


def test_a_loss_scaler_sees_what_overflows(wire: Wire) -> None:
    found = reduced(BucketHook(BucketSync("float16"), wire, scales_loss=True), Bucket([1e6, 1.0]))
    assert found.tolist() == [torch.inf, 1]
    assert wire.ledger.clamped_elements == 0


@pytest.mark.parametrize(("finds_unused", "last", "handed"), [(True, True, 8), (True, False, 0), (False, True, 0)])
def test_ddps_map_of_unused_parameters_is_entered_once_per_pass(
    wire: Wire, finds_unused: bool, last: bool, handed: int
) -> None:
    hook = BucketHook(BucketSync(), wire)
    hook.attach(list(nn.Linear(2, 2).parameters()), finds_unused)
    reduced(hook, Bucket([1.0], last))
    assert wire.ledger.handed_bytes(DDP_UNUSED) == handed


class Failed:
    """Gloo's work at the moment when its future has failed, which wakes DDP, and the work does not say so yet."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.future.set_exception(RuntimeError("Connection closed by peer"))

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        return self.future

    def is_completed(self) -> bool:
        return False


def test_a_lost_peer_is_noticed_as_soon_as_the_future_has_failed(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: Failed())
    hook = BucketHook(BucketSync(), wire)
    hook.begin()
    with pytest.raises(RuntimeError):
        reduced(hook, Bucket([1.0]))
    assert not wire.failures
    with pytest.raises(PeerError, match="all_reduce of 4 bytes"):
        hook.raise_failure()
    assert len(wire.failures) == 1


def test_parameters_in_no_bucket_are_averaged_at_the_step(wire: Wire) -> None:
    module = nn.Linear(2, 2)
    hook = BucketHook(BucketSync(), wire)
    named = list(module.named_parameters())
    assert hook.not_in_buckets(named) == named
    hook.attach([module.weight], finds_unused=False)
    left = hook.not_in_buckets(named)
    assert [name for name, _ in left] == ["bias"]
    share = BucketSync("float16").start(SGD(module.parameters(), lr=0.1), left, wire)
    assert isinstance(share, GradientShare)
    assert isinstance(share.channel.exchange, DenseAllReduce)
    assert share.channel.exchange.wire_dtype == "float16"


def test_for_some_of_the_parameters_it_works_at_the_step() -> None:
    limited = BucketSync("bfloat16").limited(inside=["a.*"])
    assert isinstance(limited, GradientSync)
    assert limited.inside == (("a.*",),)
    assert isinstance(limited.channel.exchange, DenseAllReduce)
    assert limited.channel.exchange.wire_dtype == "bfloat16"


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="wire_dtype must be one of same, float32, float16, bfloat16; got 'fp16'"):
        BucketSync("fp16")  # type: ignore[arg-type]
