"""Random Keras models: training on two and three ranks against one process.

`python -m stress.keras --backend torch --cases 2000 --seed 1`
"""
