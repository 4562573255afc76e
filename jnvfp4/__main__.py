"""``python -m jnvfp4 doctor``"""

import sys

from .support import main

sys.exit(main(sys.argv[1:]))
