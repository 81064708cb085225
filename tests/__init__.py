from testbed import ROOT as ROOT
