"""The viewer: one local page that shows what a model answers, its maps, and what its run recorded.

guard      who may ask: hosts, origins, sizes, deadlines, headers
uploads    uploaded pictures: checked, in memory, the least recently used dropped first
library    models and runs, known to requests by id alone
answers    what a model says of a picture, its rankings, and what it says with patches taken away
runs       settings, scores and curves out of run folders
worker     one thread for all model work, with a bounded queue
app        the addresses; static/ is the page: no build step, nothing from the network
"""
