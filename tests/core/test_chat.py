"""A text that comes in pieces."""

from app.core.message.chat import MOST_PIECES, append_piece


def test_a_long_text_is_kept_in_few_pieces() -> None:
    pieces: list[str] = []
    text_pieces = [f"word {n} " for n in range(10 * MOST_PIECES + 7)]
    for piece in text_pieces:
        append_piece(pieces, piece)
        assert len(pieces) < MOST_PIECES
    assert "".join(pieces) == "".join(text_pieces)
