"""Requests of which predictors are asked, and predictors that err."""

import numpy as np
from hypothesis import strategies as st

from policies.core.request import Prompt, Request
from policies.prediction.oracles import BucketClassifier, OracleWithNoise

NUM_DRAWS = 20_000
BOUNDS = (100, 200, 400)
CONFUSION = ((0.7, 0.2, 0.1), (0.25, 0.5, 0.25), (0.0, 0.4, 0.6))
STAND_INS = [OracleWithNoise(error=0.7), BucketClassifier(upper_bounds=BOUNDS, confusion=CONFUSION)]

lengths = st.integers(1, 100_000)


def request(request_id=0, num_prompt_tokens=10, max_tokens=None, tenant=""):
    return Request(request_id, 0.0, Prompt(num_prompt_tokens), max_tokens=max_tokens, tenant=tenant)


def teach(predictor, history):
    for num_prompt_tokens, num_output_tokens, tenant in history:
        predictor.observe(request(0, num_prompt_tokens, tenant=tenant), num_output_tokens)


def draws(predictor, true_num_tokens, num_draws=NUM_DRAWS):
    return np.array([predictor.predict(request(i), true_num_tokens) for i in range(num_draws)])


def ids(predictor):
    return type(predictor).__name__
