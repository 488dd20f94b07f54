"""Models as pure functions of dense features and activations: they never see a table.

Read `DLRM` first; `DCNv2`, `LR`, `FM`, `DNN`, `WideAndDeep`, `DeepFM` and `FinalMLP` have the same signature. `DIN`
takes a history beside, and `Side` is one of two towers for retrieval, with `in_batch_softmax` as their loss.
`link_prediction` has the scores, losses and ranks of knowledge graphs. docs/your_model.md says what a model of your
own may want.
"""

from jaxrec.models.dcnv2 import DCNv2
from jaxrec.models.deep import DNN, DeepFM, WideAndDeep
from jaxrec.models.din import DIN
from jaxrec.models.dlrm import DLRM
from jaxrec.models.finalmlp import FinalMLP
from jaxrec.models.fm import FM
from jaxrec.models.lr import LR
from jaxrec.models.two_tower import Side, in_batch_softmax

__all__ = ["DIN", "DLRM", "DNN", "FM", "LR", "DCNv2", "DeepFM", "FinalMLP", "Side", "WideAndDeep", "in_batch_softmax"]
