"""A text that comes in pieces."""

from app.core.message.chat import TOGETHER, gather


def test_a_long_text_is_kept_in_few_pieces() -> None:
    pieces: list[str] = []
    said = [f"word {n} " for n in range(10 * TOGETHER + 7)]
    for piece in said:
        gather(pieces, piece)
        assert len(pieces) < TOGETHER
    assert "".join(pieces) == "".join(said)
