"""Common English words of 3 to 7 letters for spelling and reversing."""

# ruff: noqa: SIM905 (lists of words read best as text)

WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        """
acid acorn actor adult agent alarm album alley amber angel anger angle ankle apple april apron arena arrow
aspen atlas attic aunt award bacon badge baker bamboo banana banjo barley barn basin basket beach bead beard
beast beaver bench berry bird bishop blade blanket blossom boat bone bonus book border bottle boulder brain branch
brave breeze brick bridge bronze broom brother brush bubble bucket buckle budget butter button cabin cable
cactus camel camera canal candle cannon canoe canvas canyon captain carbon cargo carpet carrot castle cattle cave
cedar cellar cement cereal chain chair chalk cherry chess chest chicken chin circle citrus clay cliff clock
cloud clover coast cobra coffee coin collar comet copper coral corner cotton couch cousin crab cradle crane crayon
creek cricket crow crown crystal cup curtain daisy dance dawn deer denim desert diamond dinner dolphin donkey
door dragon drawer dream drum duck dust eagle easel east echo elbow elm ember engine falcon family farmer
feather fence fern ferry fiddle field finger flag flame flour flower flute foam forest fork fossil fountain fox frog
garden garlic ghost giant ginger glacier glass globe glove goat goose grain grape grass gravel
guitar hammer harbor harp hawk hazel heart hedge helmet herb heron honey hood horn horse hotel house hunter
icicle igloo insect iron island ivory ivy jacket jaguar jelly jewel jungle kernel kettle kitten knee knife ladder
lake lamp lantern lawn leaf leather lemon lentil lily linen lion llama lobster locket lotus lumber
magnet mango maple marble market meadow melon mercy metal mineral mint mirror mitten monkey moon moss moth motor
museum music mustard napkin needle nest noodle north nose nugget oak oasis ocean olive onion orbit
orchard otter oven owl oxygen oyster paddle palace palm panda panther paper parsley pastry peach peanut
pearl pebble pelican pencil pepper petal piano pigeon pillow pilot pine plant plaster plum pocket pond
poppy potato pottery prairie prince puddle pumpkin puppy quartz quilt radish ranch raven reef
ribbon ring river robin rocket roof rope rose ruby saddle sail salmon salt sand sandal sapling
scarf school sea seal shadow shark sheep shell shield ship shoe shore shovel silk sister skate sky slate
sled smoke snail snow soap sock soil soup spade spark sparrow spider spinach spirit spoon square squid stable
statue steam steel stone stool storm stove straw sugar sun swan sweater table tailor temple
tent thistle thorn thread throne thunder ticket tiger timber toast tomato tower trail trout trumpet tulip
tunnel turkey turnip turtle twig valley vase velvet vine violin volcano wagon walnut walrus wave
wheat whistle willow window wolf wood wool zebra
""".split()
    )
)
