"""Text to batches in four steps, each a plain function of the one before.

**Documents.** A source (`python-stdlib`, a file, a folder, `hf:name` …) is a list of documents in
a fixed order. A text file that is named by itself is cut at line ends, into 1 to 64 KiB each.

**Split.** A document is held out when the first 64 bits of the SHA-256 of its text are below the
validation share of their range, so adding text moves nothing. Each side gets one at least.

**Tokens.** A byte-level BPE is trained on about 16 MiB of training documents, or an existing
tokenizer is used. A document is BEGIN (if there is one) + its tokens + END; text never yields a
special token. The documents of each source and split lie end to end in one memory-mapped file,
reused for as long as text, tokenizer and split are the same.

**Batches.** Windows of T tokens are cut from that stream, across the ends of documents, each
overlapping the one before by a token. Every epoch visits all windows once, in a permutation that
depends on the seed and the epoch only; weighted sources alternate in exact shares. Document masks
say which document a token is of. `MaskedBatches` hides tokens of the same windows.
"""

from clearhead.data.batches import MASK as MASK
from clearhead.data.batches import Batches as Batches
from clearhead.data.batches import MaskedBatches as MaskedBatches
from clearhead.data.batches import Masking as Masking
from clearhead.data.batches import windows as windows
from clearhead.data.batches import with_mask_token as with_mask_token
from clearhead.data.corpus import Corpus as Corpus
from clearhead.data.corpus import TokenStream as TokenStream
from clearhead.data.corpus import prepare as prepare
from clearhead.data.labelled import Labelled as Labelled
from clearhead.data.labelled import LabelledBatches as LabelledBatches
from clearhead.data.tokenizer import BEGIN as BEGIN
from clearhead.data.tokenizer import END as END
from clearhead.data.tokenizer import PAD as PAD
from clearhead.settings.data import BANKING as BANKING
from clearhead.settings.data import GLUE as GLUE
from clearhead.settings.data import TASKS as TASKS
from clearhead.settings.data import DataConfig as DataConfig
from clearhead.settings.data import Task as Task
