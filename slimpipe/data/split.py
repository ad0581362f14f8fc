"""A part of a token file that is kept back for evaluation."""

from __future__ import annotations

from slimpipe.data.indexed import IndexedDataset


def held_out(dataset: IndexedDataset, share: float) -> int:
    """Where the evaluation part begins: tokens before it are trained on, those from it on never are.

    The last `share` of the tokens, 0 < share < 1, moved to the nearest start of a document where that changes the size
    of the part by half of it at most; else a document is cut in two, as with a corpus that is one long text. May be 0
    or the number of tokens where the file is tiny.
    """
    count = len(dataset.tokens)
    cut = count - round(count * share)
    # Bisection over document starts, which rise: the first at or behind the cut.
    low, high = 0, dataset.documents
    while low < high:
        middle = (low + high) // 2
        if dataset.start(middle) < cut:
            low = middle + 1
        else:
            high = middle
    starts = [dataset.start(document) for document in (low - 1, low) if 0 <= document <= dataset.documents]
    nearest = min((start for start in starts if 0 < start < count), key=lambda start: abs(start - cut), default=cut)
    return nearest if abs(nearest - cut) <= (count - cut) // 2 else cut
