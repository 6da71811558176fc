"""The first import of the server of ranks: it collects no garbage while it imports the rest. Ranks collect again."""

import gc

gc.disable()
