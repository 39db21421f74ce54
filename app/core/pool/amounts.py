"""Amounts of money and tokens together, as a call holds and spends them (D7)."""

from app.core.records import record


@record(frozen=True, slots=True)
class Amount:
    """An amount of micro-dollars and tokens."""

    usd: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        """Both together."""
        return Amount(self.usd + other.usd, self.tokens + other.tokens)

    def less(self, other: "Amount") -> "Amount":
        """This amount without the other one; never below nothing."""
        return Amount(max(self.usd - other.usd, 0), max(self.tokens - other.tokens, 0))

    def holds(self, other: "Amount") -> bool:
        """Return True if the other amount can be paid from this one."""
        return other.usd <= self.usd and other.tokens <= self.tokens

    def lack(self, price: "Amount") -> str:
        """Return what is missing for a price: `usd`, `tokens`, or nothing."""
        if price.usd > self.usd:
            return "usd"
        return "tokens" if price.tokens > self.tokens else ""
