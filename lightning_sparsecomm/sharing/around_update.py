"""The moments right before and right after an optimizer changes its weights, between which no other code runs."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class AroundUpdate:
    """Calls `before` after a step's closure, and `after` before any other hook that torch calls after the step.

    Both are bound methods, whose object is held weakly. When it is gone, the hooks stay and do nothing, because
    torch fails a step in which its table of hooks changes. In a step that has begun already, only `after` is called.

    Torch also calls hooks around the step of a parent class that a subclass's `step` calls. All that is one update.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._begun = False
        # Steps under way, one in another.
        self._depth = 0
        watching = weakref.ref(self)
        optimizer.register_step_pre_hook(lambda _, args, kwargs: _begin(watching(), args, kwargs))
        handle = optimizer.register_step_post_hook(lambda *_: _end(watching()))
        hooks = optimizer._optimizer_step_post_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(handle.id, last=False)

    def enter(self) -> None:
        """A step begins, which may be within another."""
        self._depth += 1

    def begin(self) -> None:
        """The weights are about to change; only the first call in a step counts, if the closure runs several times."""
        before = self._before()
        if not self._begun and before is not None:
            before()
        self._begun = True

    def end(self) -> None:
        """A step has ended; with the outermost one the weights have changed."""
        self._depth -= 1
        if self._depth > 0:
            return
        self.forget()
        after = self._after()
        if after is not None:
            after()

    def forget(self) -> None:
        """No step is under way, also where an error has ended one."""
        self._begun, self._depth = False, 0


def _begin(watching: AroundUpdate | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if watching is None:
        return None
    watching.enter()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        watching.begin()
        return None

    def closure_then_begin() -> Any:
        result = closure()
        watching.begin()
        return result

    return (args[0], *args[2:]), {**kwargs, "closure": closure_then_begin}


def _end(watching: AroundUpdate | None) -> None:
    if watching is not None:
        watching.end()
