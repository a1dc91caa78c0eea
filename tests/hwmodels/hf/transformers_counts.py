"""Prints the default configuration of each causal language model of transformers, and its parameters: JSON.

Run by a Python that has torch and transformers: `test_against_transformers.py` starts it. Modules are made on
the meta device, so no memory is taken. Classes whose defaults make no model are left out.
"""

import json
import sys
import warnings

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES


def counted(kind):
    """Returns the configuration as a checkpoint's config.json has it, and the number of parameters."""
    config = transformers.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    fields = json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = [type(model).__name__]
    return {"config": fields, "parameters": sum(one.numel() for one in model.parameters())}


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for kind in CLASSES:
        try:
            found[kind] = counted(kind)
        except Exception as error:
            print(f"{kind}: {type(error).__name__}", file=sys.stderr)
    json.dump({"version": transformers.__version__, "models": found}, sys.stdout)


if __name__ == "__main__":
    main()
