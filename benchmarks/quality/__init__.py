"""What recipes cost in accuracy: errors of products, and losses of models that are trained or only quantized."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # for lm, the language model of the examples
