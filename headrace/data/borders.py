"""Where a border between two characters of a text lies among its tokens, if it lies between two at all."""

from collections.abc import Sequence

import numpy as np

from headrace.data.packing import Indices
from headrace.data.tokens import Encoding, IdArray, Tokenizer, encode


def find_borders(
    tokenizer: Tokenizer, texts: Sequence[str], encodings: Sequence[Encoding], cuts: Sequence[Sequence[int]]
) -> list[list[int | None]]:
    """For every text and every cut in it, the number of tokens before the cut.

    It is None where the text up to the cut, tokenised alone, isn't the very beginning of the tokens of the
    whole: the cut lies inside a token, or what follows changes the tokens in front of it.

    To tokenise every beginning would cost the square of a text's length. But tokenizers divide a text at
    special tokens first and look at each piece alone, so it is enough to begin at the last of them.

    Args:
        tokenizer: what made ``encodings``.
        texts: whole texts.
        encodings: the tokens of each.
        cuts: for each text, numbers of characters.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {number: token.content for number, token in added if token.special}
    anchors: list[tuple[int, int]] = []
    pieces: list[str] = []
    for text, found, cuts_here in zip(texts, encodings, cuts, strict=True):
        places = _special_places(text, found, special)
        for cut in cuts_here:
            anchors.append(_anchor(found, places, cut))
            pieces.append(text[anchors[-1][1] : cut])
    tried = zip(anchors, encode(tokenizer, pieces), strict=True)
    return [
        [_border(found, cut, *next(tried)) for cut in cuts_here]
        for found, cuts_here in zip(encodings, cuts, strict=True)
    ]


def _special_places(text: str, found: Encoding, special: dict[int, str]) -> Indices:
    """Indices of special tokens that stand in the text as such, and not for a character without a token."""
    places = np.flatnonzero(np.isin(found.ids, list(special)))
    written = [text[found.starts[i] : found.ends[i]] == special[int(found.ids[i])] for i in places]
    return places[np.asarray(written, dtype=np.bool_)]


def _anchor(found: Encoding, places: Indices, cut: int) -> tuple[int, int]:
    """Token and character at which the last special token before ``cut`` begins, or the text."""
    before = int(np.searchsorted(found.ends[places], cut, side="right"))
    return (int(places[before - 1]), int(found.starts[places[before - 1]])) if before else (0, 0)


def _border(found: Encoding, cut: int, anchor: tuple[int, int], piece: IdArray) -> int | None:
    border = anchor[0] + len(piece)
    if not np.array_equal(found.ids[anchor[0] : border], piece):
        return None
    # Equal ids may still stand for other characters, where many share one id for "unknown".
    ends_before = border == 0 or found.ends[border - 1] <= cut
    starts_after = border == len(found.ids) or found.starts[border] >= cut
    return border if ends_before and starts_after else None
