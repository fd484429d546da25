"""The public names with their types; ``__init__.py`` imports them when they are first used."""

from casewise import monai as monai
from casewise.adapt.adaptation import Adaptation as Adaptation
from casewise.adapt.model import Model as Model
from casewise.adapt.proposers.live import run_episode as run_episode
from casewise.archive.store import create_archive as create_archive
from casewise.archive.store import open_archive as open_archive
from casewise.bench import bench as bench
from casewise.core.errors import BadInput as BadInput
from casewise.core.errors import CasewiseError as CasewiseError
from casewise.core.records import Case as Case
from casewise.core.records import Decision as Decision
from casewise.core.records import Policy as Policy
from casewise.core.records import State as State
from casewise.core.records import Trajectory as Trajectory
from casewise.deployment import Deployment as Deployment
from casewise.deployment.saved import load as load
from casewise.fit import fit as fit
from casewise.guard import guard as guard
from casewise.judge.calibration.calibrate import calibrate as calibrate
from casewise.judge.certificates.certify import certify as certify
from casewise.judge.policy import controller_of as controller_of
from casewise.judge.policy import read_policy as read_policy
from casewise.judge.policy import write_policy as write_policy
from casewise.measure.metrics.harm import harm as harm
from casewise.measure.metrics.overlap import dice as dice
from casewise.measure.metrics.overlap import miou as miou
from casewise.measure.metrics.surface import assd as assd
from casewise.measure.metrics.surface import hd95 as hd95
from casewise.measure.signals.fragmentation import fragmentation as fragmentation
from casewise.replay import replay as replay
from casewise.study.compare import compare as compare

__version__: str
