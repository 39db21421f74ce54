"""The keys of a body that an error message may repeat, and the length of a field's path in one.

Free of FastAPI, because commands that print runs read this module too.
"""

import re
from typing import Final

FIELD_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
"""A key of a body that may be repeated in a message, because it looks like the name of a field."""
MOST_PARAM_CHARS: Final = 256
