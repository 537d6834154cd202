// How the search of the site orders pages; `docs/conf.py` names this file.
//
// A page that shows how to do something stands above others that are as good, and all pages for
// users above those about how Kubetorch is built. The other numbers are those of Sphinx.
const IS_HOW_TO = /^docs\/howto\//;
const IS_OF_THE_PROJECT = /^(docs\/design\/|ARCHITECTURE$|CHANGELOG$|CONTRIBUTING$)/;

var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score + (IS_HOW_TO.test(page) ? 1 : 0) - (IS_OF_THE_PROJECT.test(page) ? 1000 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
