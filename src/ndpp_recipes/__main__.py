"""python -m ndpp_recipes: the same as `ndpp`."""

import sys

from .cli import main

sys.exit(main())
