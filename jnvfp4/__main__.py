"""``python -m jnvfp4``, the same as the command ``jnvfp4``."""

import sys

from .cli import main

sys.exit(main())
