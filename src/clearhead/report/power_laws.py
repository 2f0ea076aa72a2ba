"""Losses as power laws of the cost of training: L = E + A·C^−α, fitted robustly, with draws.

Two arms on one text share E, the loss that no training removes: it belongs to the text. With an E
each, three or four sizes leave E and α nearly free to trade off against each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DRAWS = 1000
HUBER = 1e-3  # in log loss, as in arXiv 2203.15556: an outlying run weighs little
_STEPS = 300
_TOLERANCE = 1e-10
# Starts: E as a share of the lowest loss, and α.
_SHARES, _EXPONENTS = (0.1, 0.5, 0.8, 0.95), (0.05, 0.2, 0.5, 1.0)
_EXPONENT_RANGE = (1e-3, 4.0)


@dataclass(frozen=True, kw_only=True)
class PowerLaws:
    """Fitted laws of a baseline and a variant.

    Attributes:
        parameters: log E, then log A and log α of the baseline and of the variant, at costs in
            units of `unit`.
        draws: the same, a row for each draw of the seeds' spread; no rows where no size has two
            seeds of an arm.
        unit: geometric mean of the costs.
        misfit: the most by which a size's mean log loss lies off its law.
    """

    parameters: Array
    draws: Array
    unit: float
    misfit: float

    @property
    def floor(self) -> float:
        """E, in nats."""
        return float(np.exp(self.parameters[0]))

    @property
    def exponents(self) -> tuple[float, float]:
        """α of the baseline and of the variant."""
        baseline, variant = np.exp(self.parameters[[2, 4]])
        return float(baseline), float(variant)

    def interval_of_exponent(self, variant: bool) -> tuple[float, float] | None:
        """The 95 % interval of an arm's α; None without draws."""
        return _interval(np.exp(self.draws[:, 4 if variant else 2]))

    def speedup(self, cost: float) -> float:
        """The cost at which the baseline has the loss that the variant has at `cost`, over it."""
        return float(self._speedup(self.parameters, cost))

    def interval_of_speedup(self, cost: float) -> tuple[float, float] | None:
        """Its 95 % interval; None without draws."""
        return _interval(self._speedup(self.draws, cost))

    def _speedup(self, parameters: Array, cost: float) -> Any:
        """C_baseline / C, from E + A_b C_b^−α_b = E + A_v C^−α_v, within what numbers can say."""
        _, a_b, k_b, a_v, k_v = np.moveaxis(parameters, -1, 0)
        x = np.log(cost / self.unit)
        return np.exp(np.clip((a_b - a_v + np.exp(k_v) * x) / np.exp(k_b) - x, -100, 100))


def fit(
    baseline: Sequence[tuple[Sequence[float], Sequence[float]]],
    variant: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    draws: int = DRAWS,
) -> PowerLaws:
    """Fit the laws of two arms to (costs, losses) of the seeds at each of three or more sizes.

    Least squares of the log loss with Huber's weights, by Levenberg and Marquardt from several
    starts, at the geometric mean of a size's costs. Draws are the fitted laws with noise of three
    kinds, and are fitted again: the seeds' spread in loss, pooled over sizes and arms, whose own
    uncertainty is drawn too (so that intervals have Student's tails); for all seeds of a size
    together, how much further the sizes lie off the laws than that spread explains; and likewise
    the error of a size's mean cost, from the seeds' spread in cost: clocks differ.
    """
    points = [
        (cost, loss, float(arm), index)
        for arm, sizes in enumerate((baseline, variant))
        for index, (costs, losses) in enumerate(sizes)
        for cost, loss in zip(costs, losses, strict=True)
    ]
    cost, loss, arm, size = (np.array(column) for column in zip(*points, strict=True))
    unit = float(np.exp(np.log(cost).mean()))
    group_N = arm * len(points) + size
    members = [group_N == one for one in np.unique(group_N)]
    x_N, y_N = np.log(cost / unit), np.log(loss)
    spread_N = x_N.copy()
    for one in members:
        x_N[one] = x_N[one].mean()
    spread_N -= x_N
    found_SP = _levenberg(_starts(x_N, loss, arm), x_N, arm, y_N[None])
    objectives = _objective(_law(found_SP, x_N, arm)[0] - y_N).sum(-1)
    best = found_SP[np.argmin(objectives)]
    offset_N = _law(best[None], x_N, arm)[0][0] - y_N
    offsets = [float(offset_N[one].mean()) for one in members]
    misfit = max(map(abs, offsets))
    degrees = len(points) - len(members)
    if not degrees:
        return PowerLaws(parameters=best, draws=np.empty((0, 5)), unit=unit, misfit=misfit)
    squares = sum(float(((y_N[one] - y_N[one].mean()) ** 2).sum()) for one in members)
    random = np.random.default_rng(0)
    deviation_B1 = np.sqrt(squares / random.chisquare(degrees, (draws, 1)))
    noise_BN = deviation_B1 * random.standard_normal((draws, len(y_N)))
    explained = squares / degrees * fmean(1 / one.sum() for one in members)
    free = max(1, len(members) - len(best))
    unexplained = max(0.0, sum(one**2 for one in offsets) / free - explained)
    for one in members:
        noise_BN[:, one] += np.sqrt(unexplained) * random.standard_normal((draws, 1))
    drawn_BN = _law(best[None], x_N, arm)[0] + noise_BN
    x_BN = np.tile(x_N, (draws, 1))
    deviation_B1 = np.sqrt((spread_N**2).sum() / random.chisquare(degrees, (draws, 1)))
    for one in members:
        mean_B1 = random.standard_normal((draws, 1)) / np.sqrt(one.sum())
        x_BN[:, one] += deviation_B1 * mean_B1
    starts_BP = np.broadcast_to(best, (draws, 5))
    found_BP = _levenberg(starts_BP, x_BN, arm, drawn_BN)
    return PowerLaws(parameters=best, draws=found_BP, unit=unit, misfit=misfit)


def _interval(values: Array) -> tuple[float, float] | None:
    if not len(values):
        return None
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _starts(x_N: Array, loss_N: Array, arm_N: Array) -> Array:
    starts = []
    for share in _SHARES:
        floor = share * loss_N.min()
        above_N = np.log(loss_N - floor)
        for alpha in _EXPONENTS:
            scales = [float((above_N + alpha * x_N)[arm_N == arm].mean()) for arm in (0, 1)]
            starts.append([np.log(floor), scales[0], np.log(alpha), scales[1], np.log(alpha)])
    return np.array(starts)


def _law(theta_BP: Array, x_N: Array, arm_N: Array) -> tuple[Array, Array, Array]:
    """log L of every point under every row of parameters, log of its A·C^−α, and α."""
    of = 1 + 2 * arm_N.astype(int)
    alpha_BN = np.exp(theta_BP[:, of + 1])
    reducible_BN = theta_BP[:, of] - alpha_BN * x_N
    return np.logaddexp(theta_BP[:, :1], reducible_BN), reducible_BN, alpha_BN


def _objective(residual_BN: Array) -> Array:
    """Huber's loss."""
    size = np.abs(residual_BN)
    return np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))


def _levenberg(theta_BP: Array, x_N: Array, arm_N: Array, y_BN: Array) -> Array:
    """Minimise for all rows at once; x and y have a row for each, or one for all."""
    theta_BP = theta_BP.copy()
    damping_B = np.full(len(theta_BP), 1e-2)
    value_B = _objective(_law(theta_BP, x_N, arm_N)[0] - y_BN).sum(-1)
    low, high = np.log(_EXPONENT_RANGE)
    floor_range = (np.log(1e-6), y_BN.min(-1))
    arms_KN = np.stack([arm_N == 0, arm_N == 1]).astype(float)
    for _ in range(_STEPS):
        log_loss_BN, reducible_BN, alpha_BN = _law(theta_BP, x_N, arm_N)
        residual_BN = log_loss_BN - y_BN
        share_BN = np.exp(reducible_BN - log_loss_BN)  # of the loss that training removes
        slopes = [1 - share_BN]
        for own_N in arms_KN:
            slopes += [share_BN * own_N, -share_BN * alpha_BN * x_N * own_N]
        jacobian_BNP = np.stack(slopes, -1)
        weights_BN = HUBER / np.maximum(np.abs(residual_BN), HUBER)
        weighted_BPN = (jacobian_BNP * weights_BN[..., None]).swapaxes(1, 2)
        hessian_BPP = weighted_BPN @ jacobian_BNP
        slope_BP = (weighted_BPN @ residual_BN[..., None])[..., 0]
        diagonal_BP = np.einsum("bpp->bp", hessian_BPP)
        ridge_BP = damping_B[:, None] * diagonal_BP + 1e-12
        damped_BPP = hessian_BPP + ridge_BP[..., None] * np.eye(theta_BP.shape[1])
        step_BP = np.clip(np.linalg.solve(damped_BPP, -slope_BP[..., None])[..., 0], -1, 1)
        tried_BP = theta_BP + step_BP
        tried_BP[:, 0] = np.clip(tried_BP[:, 0], *floor_range)
        tried_BP[:, [2, 4]] = np.clip(tried_BP[:, [2, 4]], low, high)
        tried_B = _objective(_law(tried_BP, x_N, arm_N)[0] - y_BN).sum(-1)
        better_B = tried_B < value_B
        done = (value_B - tried_B) <= _TOLERANCE * value_B
        theta_BP[better_B] = tried_BP[better_B]
        value_B = np.where(better_B, tried_B, value_B)
        damping_B = np.clip(np.where(better_B, damping_B / 3, damping_B * 4), 1e-9, 1e9)
        if np.all(done & (better_B | (damping_B > 1e6))):
            break
    return theta_BP
