"""Characters that nobody sees and a worker reads.

Whoever decides on a text, or audits it, must see that it has them: a few of them spell whole sentences between two
words. The joiners of emoji and of Persian words, and the two selectors that say whether a sign is an emoji, are not
among them, because ordinary texts need these.
"""

from typing import Final

HIDDEN: Final = frozenset(
    [
        *range(0x80, 0xA0),  # control characters
        *(0x00AD, 0x034F, 0x115F, 0x1160, 0x180E, 0x3164, 0xFFA0),  # a soft hyphen, a joiner and empty letters
        *(0x200B, 0x2028, 0x2029, *range(0x2060, 0x2066), *range(0x206A, 0x2070), 0xFEFF),  # spaces without a width
        *(*range(0x180B, 0x180E), 0x180F, *range(0xFE00, 0xFE0E)),  # selectors of a variant of the character before
        *range(0xE0000, 0xE01F0),  # tags, and further selectors
    ]
)
