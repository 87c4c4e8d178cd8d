"""Pure functions of tensors: surrogates, terms, their aggregation, KL estimates and diagnostics."""

from pspo.errors import UserCodeError
from pspo.losses.aggregate import Aggregation, Counts, aggregate
from pspo.losses.diagnostics import diagnose, diagnose_correction, token_weights
from pspo.losses.others import ASPO, CEGPPO, CISPO, DPPO, DRO, GMPO, GSPO, REINFORCE, SPO, VESPO
from pspo.losses.surrogates import P3O, PSPO, SAPO, TOPR, Clip, NoClip, Surrogate, check_loss, log_ratio
from pspo.losses.terms import (
    Correction,
    EntropyBonus,
    EntropyQuantile,
    KLEstimator,
    KLPenalty,
    LossInputs,
    OffPolicyMask,
    SamplerCorrection,
    SquaredLogRatio,
    Term,
    correction_weights,
    kl_estimate,
)
