"""What Python runs first in each process that a test starts.

Importing PyTorch makes a million objects that stay. Looking for garbage among them again and again
is a sixth of the processor time of such a process, which often does little else.
"""

import gc

gc.set_threshold(20_000)
