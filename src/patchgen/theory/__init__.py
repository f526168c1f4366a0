"""The paper's theory, measured: every inequality with its bound, the measured value, and whether it holds.

    measure_oracle(sizes=(1, 4, 12, 36))["rows"]    # premises hold by construction; in each row of "broken" one fails
    measure_run("runs/4f2a9c01b7de")["rows"]        # a trained ViT: premises only approximate

The results concern an oracle subset C* and masks near it. None bounds the learned selector, and none says that training
finds C*.
"""
