"""Pure functions of tensors: surrogates, their aggregation, KL estimates and diagnostics."""

from pspo.losses.aggregate import Aggregation, Counts, aggregate, token_divisors
from pspo.losses.correction import Correction, corrected_tokens, correction_ratios, correction_weights, on_policy
from pspo.losses.diagnostics import diagnose, diagnose_correction, token_weights
from pspo.losses.entropy import adapt_coef, entropy_quantile, token_entropies
from pspo.losses.kl import KLEstimator, kl_estimate
from pspo.losses.others import CISPO, DPPO, GMPO, GSPO, REINFORCE, VESPO
from pspo.losses.surrogates import P3O, PSPO, SAPO, TOPR, Clip, NoClip, Surrogate, SurrogateError, check_loss, log_ratio
from pspo.losses.terms import add_terms
