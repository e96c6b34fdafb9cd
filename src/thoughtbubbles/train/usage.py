"""The help of `thoughtbubbles train`, which is printed without importing torch."""

TRAIN_USAGE = """\
usage: thoughtbubbles train RECIPE [--resume] [--dry-run] [--FIELD VALUE …]
       thoughtbubbles train --resume DIR [--dry-run] [--FIELD VALUE …]
       thoughtbubbles train --list
       torchrun --nproc-per-node N -m thoughtbubbles train RECIPE …

  --list             all recipes, with parameters, tokens and expected FLOPs
  RECIPE --help      all options, with their values in this recipe
  --resume DIR       resume the run in this folder, with the settings in its run.json
  --resume           with a recipe: resume from the newest complete checkpoint in --out, or start at step 0
  --dry-run          open the data and check everything the run needs, take one step at reduced size, print the config
  --init-from DIR    start from the weights, and with the architecture, of a model, checkpoint or run;
                     --model.* options change it
  --data.val DIR …   compute the validation loss on other folders than the training data
  --profile          profile a few steps: a trace, and a table of where the time goes

Exit codes: 0 the run is finished; 1 an error, in one line; 2 options that cannot be parsed. Stopped by a signal,
after saving: 128 + its number (SIGINT 130, SIGTERM 143).

for example: thoughtbubbles train tiny --optim.lr 1e-3 --out runs/first"""
