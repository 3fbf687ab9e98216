"""The method of `strategy="sparsecomm"`."""

from lightning_sparsecomm.basis.schedules import ByLength
from lightning_sparsecomm.methods.adam import local_adam
from lightning_sparsecomm.methods.dropping import dgc, gradient_dropping
from lightning_sparsecomm.sharing import Method


def default() -> Method:
    """The method of `strategy="sparsecomm"`: dgc for SGD, local_adam for Adam and AdamW, else gradient dropping.

    The density follows from the run's length, small tensors are sent more densely, and positions in the shortest code.
    Values take three bits each, and Adam's directions, which differ less in magnitude, one; with other optimizers,
    bfloat16.

    >>> default().fallback.fallback
    gradient_dropping(density=ByLength(...), scope='balanced', values='bfloat16', positions='short')
    """
    others = gradient_dropping(ByLength(), scope="balanced", values="bfloat16", positions="short")
    adam = local_adam(ByLength(0.125, exponent=0.93, most=0.42), scope="balanced", values="one_bit", positions="short")
    sgd = dgc(
        ByLength(0.083, exponent=0.94, least=0.002, most=0.21), scope="balanced", values="three_bit", positions="short"
    )
    return sgd.with_fallback(adam.with_fallback(others))
