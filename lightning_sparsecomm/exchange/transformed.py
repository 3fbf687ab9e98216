"""An exchange of transforms."""

from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire, phase
from lightning_sparsecomm.codecs.selectors.candidates import Wanted
from lightning_sparsecomm.codecs.transforms import Transform
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values


class Transformed(Exchange):
    """Exchanges the transforms of vectors, and gives back what was shared and sent.

    What another exchange selects and rounds, it selects and rounds of the transform, such as its largest coefficients.
    Every rank inverts by itself what all share; a transform's inverse has the same bits everywhere.

    >>> exchange = Transformed(Sparse(SparseCodec(TileTopK(32, side=64))), TiledDCT(side=64))
    >>> exchange.transform
    TiledDCT(side=64)

    Args:
        inner: What exchanges the transforms.
        transform: The transform, of dense vectors.

    Raises:
        TypeError: `inner` is no exchange, or `transform` no transform.
    """

    def __init__(self, inner: Exchange, transform: Transform) -> None:
        if not isinstance(inner, Exchange):
            raise TypeError(f"inner must be an Exchange; got {inner!r}. Use Sparse(SparseCodec(TileTopK())).")
        if not isinstance(transform, Transform):
            raise TypeError(f"transform must be a Transform; got {transform!r}. Use TiledDCT(), for example.")
        self.inner = inner
        self.transform = transform
        self.sums_pieces, self.renewable = inner.sums_pieces, inner.renewable
        self._vector: Vector | None = None
        self._elements = 0

    @property
    def overlaps(self) -> bool:
        return self.inner.overlaps

    def objection(self, layout: Layout) -> str | None:
        return self.inner.objection(layout)

    def wanted(self, context: Round) -> tuple[Wanted, ...]:
        # What is largest in a vector is not what is largest in its transform.
        return ()

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        values = dense_values(x, self)
        with phase("encode"):
            self._vector = x._replace(values=self.transform.forward(values, context.layout), hints={})
        self.inner.prepare(self._vector, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        if self._vector is None:
            self.prepare(x, context, wire)
        vector, self._vector = self._vector, None
        assert vector is not None
        exchanged = self.inner.exchange(vector, context, wire)
        self._elements = self.inner.elements(exchanged)
        with phase("decode"):
            shared, sent = (self._inverse(each, x.values, context) for each in (exchanged.shared, exchanged.sent))
        return exchanged._replace(shared=shared, sent=sent)

    def _inverse(self, vector: SparseVector | Tensor, like: Tensor, context: Round) -> Tensor:
        whole = vector.dense() if isinstance(vector, SparseVector) else vector
        return self.transform.inverse(whole.to(like.dtype), context.layout)

    def elements(self, exchanged: Exchanged) -> int:
        return self._elements

    def commit(self) -> None:
        self.inner.commit()

    def abort(self) -> None:
        self._vector = None
        self.inner.abort()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)
