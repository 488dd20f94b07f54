"""Models as pure functions of dense features and activations: they never see a table.

Read `DLRM` first; `DCNv2` has the same signature. `link_prediction` has the scores, losses and
ranks of knowledge graphs. docs/your_model.md says what a model of your own may want.
"""

from jaxrec.models.dcnv2 import DCNv2
from jaxrec.models.dlrm import DLRM

__all__ = ["DLRM", "DCNv2"]
