"""Opens exported folders where the package cannot be imported: python -I -S hf_remote_probe.py OUT PATHS FOLDER …

PATHS is where other packages are, without what an editable install would add.
"""

import builtins
import importlib.util
import os
import sys
import warnings

out, paths, *folders = sys.argv[1:]
sys.path[:0] = paths.split(os.pathsep)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch on a CPU without bfloat16
assert importlib.util.find_spec("thoughtbubbles") is None

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, __version__  # noqa: E402

torch.set_num_threads(1)
found = {"version": __version__}


class Asked(BaseException):
    """Not an Exception, so that nothing catches it as a "no"."""


def refuse_to_answer(*words):
    raise Asked(*words)


builtins.input = refuse_to_answer
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    found["tokenizer"] = tokenizer("fork")["input_ids"], tokenizer.model_max_length
    try:  # the model asks: its code is in the folder
        AutoModelForCausalLM.from_pretrained(folder)
    except Asked as question:
        found["asked"] = str(question)
assert not any(name.startswith("transformers_modules") for name in sys.modules)  # none of its code has run
for folder in folders:
    here = found[folder] = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
        with torch.no_grad():
            here[str(dtype)] = model(torch.arange(24).view(2, 12)).logits
    here["names"] = list(model.state_dict())
    here["config"] = type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=True)
    inputs = tokenizer(["fork", "a"], return_tensors="pt", padding=True)
    here["greedy"] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    here["beams"] = model.generate(**inputs, max_new_tokens=4, num_beams=2)
    try:
        model.generate(**inputs, max_new_tokens=1, budget=0.5 if model.config.scores else 1.5)
    except ValueError as error:
        here["refused"] = str(error)
    loss = model.train()(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)).loss
    loss.backward()
    here["loss"], here["gradient"] = loss.detach(), model.embedding.weight.grad

assert not any(name.split(".")[0] == "thoughtbubbles" for name in sys.modules)
assert "jaxtyping" not in sys.modules
torch.save(found, out)
