"""What a step predicts."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Likeliest(NamedTuple):
    id: Int[Tensor, "B"]
    log_prob: Float[Tensor, "B"]


class Prediction(NamedTuple):
    """The prediction of each row's next token."""

    logits: Float[Tensor, "B V"]  # with merge="mixture": its log-probabilities
    streams: Int[Tensor, "B"]  # the size of the bubble that predicts it
    likeliest: Likeliest | None = None  # the likeliest token, if the step has looked for it

    def at(self, rows: Int[Tensor, "n"]) -> "Prediction":
        likeliest = None if self.likeliest is None else Likeliest(*(part[rows] for part in self.likeliest))
        return Prediction(self.logits[rows], self.streams[rows], likeliest)
