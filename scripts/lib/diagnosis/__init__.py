"""What is wrong with a TorchServe 0.12 deployment, ours or anyone's.

gson, properties_file      the two formats as TorchServe's Java reads them, kept as they were written
archives, handler_source   what is in the model store; handlers are read, never imported
logfile, host              a log; a machine
deployment                 all of it, read: one value without behaviour
settings                   deployment → the effective value of every setting and the place it came from
*_rules, diagnose          deployment → findings
repair                     what can be put right in config.properties without a doubt
"""
