"""Which methods replicas that come and go can use."""

from pathlib import Path

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import EF21
from lightning_sparsecomm.elastic.local_state import file_of
from lightning_sparsecomm.elastic.replay import replaying
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.method import Method

# A file's name may have 255 bytes, and more than this follows while it is written.
_LONGEST = 200


def check_method(method: Method, adapt_steps: bool) -> None:
    """Raises `ValueError` for a method that needs the same ranks all the time, or exchanges gradients in flight.

    Args:
        method: The method.
        adapt_steps: Whether replicas make unequally many steps between exchanges.
    """
    chain: list[Method] = []
    each: Method | None = method
    while each is not None:
        chain.append(each)
        each = each.fallback
    for one in chain:
        for sync in one.syncs:
            if getattr(sync, "delay", 0) and not isinstance(sync, DeltaSync):
                raise ValueError(
                    "delay must be 0 for gradients with replicas that come and go: the next step's meeting would wait"
                    f" for what is in flight. Got {sync!r}. Leave delay out, or use a method that exchanges weights,"
                    " such as methods.sparse_loco(every=30, delay=5)."
                )
            if sync.shares_gradients and getattr(sync, "every", 1) != 1:
                raise ValueError(
                    "every must be 1 for gradients with replicas that come and go, which must be equal after each step;"
                    f" got {sync!r}. Leave every out, or use a method that exchanges weights, such as"
                    " methods.sparse_loco(every=30)."
                )
            if any(parts_in(sync, EF21)):
                raise ValueError(
                    "method must not keep a mean estimate of all ranks' gradients with replicas that come and go, since"
                    f" it is of those that have made it; got {method!r}. Use methods.gradient_dropping(), for example."
                )
            if isinstance(sync, BucketSync) or (sync.shares_gradients and sync.drifts):
                raise ValueError(
                    "method must exchange weights, or gradients that are equal on all replicas then and not in DDP's"
                    f" buckets, with replicas that come and go; got {method!r}. Use methods.sparse_loco(),"
                    " methods.default() or methods.quantized(), for example."
                )
        if len({isinstance(sync, DeltaSync) for sync in one.syncs}) > 1:
            raise ValueError(
                "method must exchange either weights or gradients with replicas that come and go, not some of each; got"
                f" {method!r}. Use one kind of sync for all parameters."
            )
        delays = sorted({sync.delay for sync in one.syncs if isinstance(sync, DeltaSync)})
        if len(delays) > 1:
            raise ValueError(
                "delay must be the same for all parameters with replicas that come and go, as one meeting serves all"
                f" that are due; got {delays}. Use delay={delays[-1]} for all."
            )
        every = sorted({repr(sync.every) for sync in one.syncs if isinstance(sync, DeltaSync)})
        if delays != [0] and len(every) > 1:
            raise ValueError(
                "every must be the same for all parameters with a delay and replicas that come and go, as one meeting"
                f" serves all that are due; got {' and '.join(every)}. Use every={every[-1]} for all, or delay=0."
            )
        if one.averaging is not None:
            raise ValueError("averaging must be None with replicas that come and go. Leave it out.")
    if adapt_steps:
        _check_adapting(method)


def check_files(membership_log: str | None, folder: str | None, replica: str | None, method: Method) -> None:
    """Raises `ValueError` for a log in no folder, and for a folder of local states that is none, or that has no use.

    Args:
        membership_log: File of the log.
        folder: Of local states.
        replica: The replica's name.
        method: Its method.
    """
    if replaying():
        # A replay has names and files of its own.
        return
    if membership_log is not None and not Path(membership_log).absolute().parent.is_dir():
        raise ValueError(
            f"membership_log must be a file in a folder that exists; got {membership_log!r}. Make the folder first."
        )
    if membership_log is not None and Path(membership_log).is_dir():
        raise ValueError(
            f"membership_log must be a file; got {membership_log!r}, which is a folder. Add a name, such as"
            " 'members.jsonl'."
        )
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ValueError(f"local_state_dir must be a folder that exists; got {folder!r}. Make it first.")
    if replica is None:
        raise ValueError(
            "replica must be given with local_state_dir: by this name, a replica that is started again finds its file"
            f" in {folder!r}. Pass replica='a', and another name to each replica."
        )
    if not _fits(replica):
        raise ValueError(
            f"replica must be a name that a file of local_state_dir can have, of {_LONGEST} bytes at most as in an"
            f" address; got {replica!r}. Choose a shorter one of plain letters and digits."
        )
    if any(sync.shares_gradients for sync in method.syncs):
        raise ValueError(
            "local_state_dir must be None with a method that exchanges gradients, whose residuals change in each step;"
            f" got {method!r}. Leave it out, or use a method that exchanges weights, such as methods.sparse_loco()."
        )


def _fits(replica: str) -> bool:
    try:
        return len(replica) > 0 and len(file_of(replica)) <= _LONGEST
    except UnicodeEncodeError:
        return False


def _check_adapting(method: Method) -> None:
    """Refuses what counts steps that all replicas must make."""
    if any(sync.fragments > 1 for sync in parts_in(method, DeltaSync)):
        raise ValueError(
            "adapt_steps must be False with fragments: each is exchanged at steps of its own, which all"
            " replicas must make. Leave fragments out."
        )
    delay = max((sync.delay for sync in parts_in(method, DeltaSync)), default=0)
    if delay:
        raise ValueError(
            "adapt_steps must be False with delay, which counts steps that all replicas make; got"
            f" delay={delay}. Leave one of the two out."
        )
    if not any(parts_in(method, DeltaSync)):
        raise ValueError(
            "adapt_steps must be False where gradients are exchanged: all replicas make the same steps. Leave"
            " it out, or use a method that exchanges weights, such as methods.sparse_loco()."
        )
