"""Statistics of a trained model: its attention weights and the distribution of its activations.

`clearhead.probe` collects them while a model runs on windows of text.
"""

from clearhead.diagnose.attention_profile import RowMeans as RowMeans
from clearhead.diagnose.diagnosis import diagnose as diagnose
from clearhead.diagnose.hidden import HiddenStatistics as HiddenStatistics
from clearhead.diagnose.hidden import RotatedKurtosis as RotatedKurtosis
from clearhead.diagnose.hidden import kurtosis as kurtosis
