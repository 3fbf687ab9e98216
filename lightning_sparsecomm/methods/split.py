"""Two methods for two parts of a model."""

from collections.abc import Sequence

from lightning_sparsecomm.methods.auto import auto
from lightning_sparsecomm.sharing import Method


class split(Method):
    """One method for some of the parameters, such as embeddings, and another for the rest.

    >>> split(["embedding.*"], s2_reducer(sketch_ratio=None), dgc(density=0.001))
    split(parameters=['embedding.*'], ...

    If one of them applies momentum or clipping instead of an optimizer that holds parameters of both (dgc), so does the
    other.

    Args:
        parameters: Shell-style patterns of parameter names.
        method: The method for parameters that match a pattern.
        rest: The method for all others.

    Raises:
        ValueError: Both average parameters, or one has a fallback for other optimizers.
        TypeError: `parameters` is not a list of patterns, or `method` or `rest` is not a Method.
    """

    def __init__(self, parameters: Sequence[str], method: Method, rest: Method) -> None:
        if isinstance(parameters, str) or not parameters or not all(isinstance(each, str) for each in parameters):
            raise TypeError(
                f"parameters must be a list of one or more patterns of names; got {parameters!r}. Use ['embedding.*']."
            )
        for option, each in (("method", method), ("rest", rest)):
            if not isinstance(each, Method):
                raise TypeError(f"{option} must be a Method, such as methods.dgc(); got {each!r}.")
            if isinstance(each, auto):
                raise ValueError(
                    f"{option} must not be auto(), which chooses for the whole model. Use methods.auto() by itself."
                )
            if each.fallback is not None:
                raise ValueError(
                    f"{option} must be one method for all optimizers; got {type(each).__name__} with another method for"
                    " other optimizers, as methods.default() has."
                    " Use methods.dgc() for SGD, or methods.local_adam() for Adam and AdamW."
                )
        if method.averaging is not None and rest.averaging is not None:
            raise ValueError("method and rest both average all parameters. Use average_every=None in one of them.")
        super().__init__(
            [
                *(sync.limited(inside=parameters) for sync in method.syncs),
                *(sync.limited(outside=parameters) for sync in rest.syncs),
            ],
            method.averaging or rest.averaging,
        )
