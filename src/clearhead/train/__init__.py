"""Training: the loop, its checkpoints, and the callback protocol."""

from clearhead.settings.train import FinetuneConfig as FinetuneConfig
from clearhead.settings.train import TrainConfig as TrainConfig
from clearhead.train.callbacks import Callback as Callback
from clearhead.train.callbacks import DivergedError as DivergedError
from clearhead.train.callbacks import InterruptedRun as InterruptedRun
from clearhead.train.callbacks import MetricsFile as MetricsFile
from clearhead.train.callbacks import Progress as Progress
from clearhead.train.callbacks import Run as Run
from clearhead.train.callbacks import StepMetrics as StepMetrics
from clearhead.train.callbacks import TensorBoard as TensorBoard
from clearhead.train.callbacks import TrainResult as TrainResult
from clearhead.train.callbacks import WandB as WandB
from clearhead.train.callbacks import make_trackers as make_trackers
from clearhead.train.loop import train as train
from clearhead.train.loop import train_to_end as train_to_end
from clearhead.train.parallel import BatchSource as BatchSource
from clearhead.train.run_dir import holds_run as holds_run
from clearhead.train.run_dir import is_finished as is_finished
