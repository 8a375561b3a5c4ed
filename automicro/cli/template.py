"""Texts to start a config with: a whole one, and how it names things."""

TEMPLATE = """\
# A config to start with. Replace each ???, here or on the command line, and try it:
#   automicro config job.yaml      shows all keys and finds mistakes in them
#   automicro verify job.yaml      tells whether batches may be split
#   automicro train job.yaml
# automicro config --keys explains every key.

global_batch_size: 32        # rows of an optimization batch, whatever the memory

model:
  call: ???                  # import path of your module, such as my_module.MyModel
  args: {}                   # its arguments by name

train_data:
  call: ???                  # of a function that returns a DataLoader
  args: {batch_size: "${global_batch_size}"}

loss:                        # called as loss(model(inputs), targets); without it, the
  call: torch.nn.CrossEntropyLoss   # model computes its own loss

optimizer:                   # is handed the model's parameters first
  call: torch.optim.AdamW
  args: {lr: 1e-3}

eval_data: null              # as train_data
scheduler: null              # {call: torch.optim.lr_scheduler.StepLR, args: {step_size: 100}}
metrics: {}                  # {name: {call: torchmetrics.…, args: {…}}}

max_duration: 1ep            # ep (epochs), ba (batches), sp (samples), tok (tokens)
microbatch_size: auto        # rows computed at a time: as many as fit
memory_limit: null           # such as 8GiB
seed: 0
run_dir: null                # such as runs/${now:%Y-%m-%d_%H-%M-%S}
checkpoint: null             # {interval: 1ep}, with a run_dir to go on in: runs/first
loggers: []                  # [{call: automicro.loggers.JSONLinesLogger, args: {path: …}}]
callbacks: []                # [{call: automicro.callbacks.EarlyStopping, args: {…}}]
"""

NODE_IN_WORDS = """\
call and args: how a config names whatever is to be made, under model, train_data and others

call: text, required
    the dotted import path of a class or a function, such as torch.optim.AdamW. It is called once
    and has to return the thing itself: the model, the DataLoader, the function that is the loss.
args: a mapping, default {}
    its arguments by name. A mapping with call anywhere inside is made first.

    optimizer:
      call: torch.optim.AdamW
      args: {lr: 1e-3}

To hand over a function instead of calling it:

    count_tokens:
      call: pkgutil.resolve_name
      args: {name: my_data.count_tokens}
"""
