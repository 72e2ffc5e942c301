"""Where each source ends if the training tokens of a packing are bounded."""

from collections.abc import Sequence
from typing import TypedDict


class End(TypedDict):
    """Where a source ended.

    Attributes:
        documents: The documents that were taken of the source, duplicates included.
        tokens: The training tokens of this source and of those before it.
    """

    documents: int
    tokens: int


class TokenLimit:
    """The end of each source: with the document that reaches the source's share of the tokens, or with its last.

    Args:
        tokens: The training tokens of the packing; None for no limit.
        weights: The weight of each source, whose share is tokens x weight / sum of weights. None takes the sources in
            order until the tokens are reached.
        ends: Where sources ended before the packing was killed, in their order. It grows with every source that ends.
    """

    def __init__(self, tokens: int | None, weights: Sequence[float] | None, ends: list[End]) -> None:
        self.ends = ends
        self._tokens, self._weights = tokens, weights
        self._source = 0
        self._over = False

    def wants(self, source: int) -> bool:
        """Returns whether more documents of a source are to be taken, of this one or of one that comes later."""
        if self._over and self._weights is None:
            return False
        return source > self._source or not self._over

    def share(self, source: int) -> int | None:
        """Returns the training tokens that a source was to give; None if it has no share of its own."""
        if self._tokens is None or self._weights is None:
            return None
        return round(self._tokens * self._weights[source] / sum(self._weights))

    def enter(self, source: int, documents: Sequence[int], trained: int) -> bool:
        """Notes that the documents to come are of a source, and returns whether an earlier source has ended by that.

        Args:
            source: The number of the source.
            documents: The documents taken of each source so far.
            trained: The training tokens so far.
        """
        before = len(self.ends)
        for left in range(self._source, source):
            if left >= len(self.ends):
                self.ends.append({"documents": documents[left], "tokens": trained})
            self._source, self._over = left + 1, False
        return len(self.ends) > before

    def took(self, documents: int, trained: int | None) -> bool:
        """Notes a document of the present source, and returns whether the source ends with it for the first time.

        Args:
            documents: The documents taken of the source so far.
            trained: The training tokens so far; None while documents of finished shards are read again.
        """
        source = self._source
        if source < len(self.ends):
            end = self.ends[source]
            # A source of several without weights may also have ended with its last document.
            limited = self._weights is not None or (self._tokens is not None and end["tokens"] >= self._tokens)
            self._over = limited and documents >= end["documents"]
            return False
        if self._tokens is None or trained is None:
            return False
        share = self.share(source)
        bound = self._tokens if share is None else share + (self.ends[-1]["tokens"] if self.ends else 0)
        if trained < bound:
            return False
        self._over = True
        self.ends.append({"documents": documents, "tokens": trained})
        return True
