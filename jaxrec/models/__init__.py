"""Models as pure functions of dense features and activations; none of them sees a table.

Start with `DLRM`; `DCNv2`, `LR`, `FM`, `DNN`, `WideAndDeep`, `DeepFM` and `FinalMLP` share its signature.
`SharedBottom` and `MMoE` have an output for each of several labels. `DIN` also takes a history, and `Side` is one of
the two towers of a retrieval model, trained with `in_batch_softmax`. `link_prediction` has scores, losses and ranks for
knowledge graphs. docs/your_model.md describes what a model of your own may need.
"""

from jaxrec.models.dcnv2 import DCNv2
from jaxrec.models.deep import DNN, DeepFM, WideAndDeep
from jaxrec.models.din import DIN
from jaxrec.models.dlrm import DLRM
from jaxrec.models.finalmlp import FinalMLP
from jaxrec.models.fm import FM
from jaxrec.models.lr import LR
from jaxrec.models.multi_task import MMoE, SharedBottom
from jaxrec.models.two_tower import Side, in_batch_softmax

__all__ = [
    "DIN", "DLRM", "DNN", "FM", "LR", "DCNv2", "DeepFM", "FinalMLP", "MMoE", "SharedBottom", "Side", "WideAndDeep",
    "in_batch_softmax",
]  # fmt: skip
