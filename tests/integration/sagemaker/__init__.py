"""SageMaker's own toolkits run jobs on hosts that this machine plays: see `hosts` and `job`."""
